"""Asks a store for everything that torch.distributed's client can ask, and compares with the answers
of Python's own server.

python3 python_peer.py PORT
"""

import datetime
import os
import sys
import threading

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
import torch.distributed as dist


def client(port):
    return dist.TCPStore(
        "127.0.0.1",
        port,
        None,
        False,
        timeout=datetime.timedelta(seconds=20),
        wait_for_workers=False,
    )


def ask(port):
    store, other = client(port), client(port)
    answers = {}

    def note(name, call):
        try:
            answers[name] = call()
        except Exception as error:  # which kind counts, its words name the port
            answers[name] = type(error).__name__

    store.set("key", "value")
    note("get", lambda: store.get("key"))
    note("empty", lambda: (store.set("empty", ""), store.get("empty")))
    note("large", lambda: (store.set("large", "x" * 1_000_000), len(store.get("large"))))
    note("add", lambda: [store.add("sum", 5), store.add("sum", -7), store.get("sum")])
    note("check", lambda: [store.check(["key", "sum"]), store.check(["key", "absent"])])
    note(
        "compare_set",
        lambda: [
            store.compare_set("cas", "x", "y"),
            store.compare_set("cas", "", "y"),
            store.compare_set("cas", "z", "w"),
            store.compare_set("cas", "y", "w"),
            store.get("cas"),
        ],
    )
    note(
        "append",
        lambda: (store.append("text", "ab"), store.append("text", "cd"), store.get("text")),
    )
    note(
        "multi", lambda: (store.multi_set(["m1", "m2"], ["1", "2"]), store.multi_get(["m2", "m1"]))
    )
    note("delete", lambda: [store.delete_key("m1"), store.delete_key("m1"), store.check(["m1"])])
    note("keys", lambda: store.num_keys() - store.check(["from_cpp"]))
    note("wait", lambda: store.wait(["absent"], datetime.timedelta(milliseconds=50)))
    note("after a wait", lambda: store.get("key"))

    setter = threading.Thread(target=lambda: other.set("late", "1"))
    setter.start()
    note("woken", lambda: store.wait(["late"], datetime.timedelta(seconds=20)))
    setter.join()

    if hasattr(store, "queue_push"):
        note(
            "queue",
            lambda: (
                store.queue_push("q", "1"),
                store.queue_push("q", "2"),
                store.queue_len("q"),
                store.queue_pop("q"),
                store.queue_pop("q"),
                store.queue_len("q"),
            ),
        )
        note("empty queue", lambda: store.queue_pop("q", False))
    if hasattr(store, "list_keys"):
        note("list", lambda: sorted(set(store.list_keys()) - {"from_cpp"}))
    if hasattr(store, "barrier"):
        peer = threading.Thread(
            target=lambda: other.barrier("all", 2, datetime.timedelta(seconds=20))
        )
        peer.start()
        note("barrier", lambda: store.barrier("all", 2, datetime.timedelta(seconds=20)))
        peer.join()
        note("barrier alone", lambda: store.barrier("more", 2, datetime.timedelta(milliseconds=50)))
    return store, answers


def main():
    serving = dist.TCPStore(
        "127.0.0.1", 0, None, True, timeout=datetime.timedelta(seconds=20), wait_for_workers=False
    )
    _, want = ask(serving.port)
    store, got = ask(int(sys.argv[1]))
    assert store.get("from_cpp") == b"1"
    for name, answer in want.items():
        assert got[name] == answer, f"{name}: {got[name]}, Python's own server says {answer}"
    assert "queue" not in got or got["queue"][-1] == 0
    store.set("from_python", "2")


main()
