"""Ranks on several hosts, each with a network of its own: results, bytes on the wire, lost hosts.

python3 wire_test.py SOURCE_DIR BUILD_DIR        (as root: the hosts' namespaces need it)
"""
import json
import os
import pathlib
import re
import sys
import time

from support.hosts import Hosts
from support.program import LIMIT_S, run, run_cases

BIN = pathlib.Path(sys.argv[2]) / "bin"
MIB = 1 << 20


def outcome(ranks):
    """Waits for all; what rank 0 reported."""
    said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    for rank, (out, err) in zip(ranks, said):
        assert rank.returncode == 0, f"rank {ranks.index(rank)} exited with {rank.returncode}:\n{out}{err}"
    return json.loads(said[0][0])


def on_one_host(ranks, size):
    done = run(BIN / "lockstep", "run", "--nproc-per-node", ranks, BIN / "bench_wire", size, 1)
    return json.loads(done.expect(out=r"^\[rank 0\] (\{.*\})$").group(1))


def compare_with_one_host(folder, hosts, each):
    size = 8 * MIB
    alone = on_one_host(hosts * each, size)
    with Hosts(folder, hosts) as network:
        spread = outcome(network.start_ranks([BIN / "bench_wire", size, 3], each))
    assert alone["backend"] == "shm" and spread["backend"] == "host-then-net", (alone, spread)
    assert spread["checksum"] == alone["checksum"], (alone, spread)
    # Each host sends its part of the other hosts' slices, and its slice of the sum to the other hosts.
    least = 2 * size * (hosts - 1) / hosts
    # TCP's headers and acknowledgements, and the small all_reduce beside it.
    assert least <= spread["sent_by_host_0"] <= 1.08 * least, (least, spread)


def test_two_by_two_ranks_have_the_bits_of_one_host_and_send_no_byte_too_many(folder):
    compare_with_one_host(folder, 2, 2)


def test_three_by_two_ranks_have_the_bits_of_one_host_and_send_no_byte_too_many(folder):
    compare_with_one_host(folder, 3, 2)


def test_one_rank_a_host_has_the_bits_of_one_host(folder):
    alone = on_one_host(3, MIB)
    with Hosts(folder, 3) as network:
        spread = outcome(network.start_ranks([BIN / "bench_wire", MIB, 1], 1))
    assert spread["backend"] == "tcp" and spread["checksum"] == alone["checksum"], (alone, spread)


def test_a_host_that_loses_power_is_named_at_the_deadline(folder):
    with Hosts(folder, 2) as network:
        # Far more steps than there is time for.
        ranks = network.start_ranks([BIN / "bench_wire", MIB, 1_000_000], 2, LOCKSTEP_TIMEOUT="3")
        network.do("until", 1, "tx", 20 * MIB)
        network.do("off", 2)
        for rank in ranks[:2]:
            out, err = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 1, f"{rank.returncode}:\n{out}{err}"
            # Whatever it was in then: a step also has a barrier.
            assert ("all_reduce" in err or "barrier" in err) and ("rank 2" in err or "rank 3" in err), err
        for rank in ranks[2:]:
            rank.communicate(timeout=LIMIT_S)


# Whether the kernel lets a program limit the pauses between two attempts (Linux 6.15).
LIMITS = "import socket\ntry: socket.socket().setsockopt(6, 44, 1000); print(1)\nexcept OSError: print(0)"


def test_what_is_lost_is_sent_again_every_second(folder):
    with Hosts(folder, 2) as network:
        # Far more steps than there is time for.
        ranks = network.start_ranks([BIN / "bench_wire", MIB, 1_000_000_000], 1, LOCKSTEP_TIMEOUT="300")
        network.do("until", 1, "tx", 20 * MIB)
        network.do("drop", 1, 2)
        # Of connections on which the same was sent again four times: what a pause is then.
        pauses, end = [], time.monotonic() + LIMIT_S
        while not pauses:
            assert time.monotonic() < end, said
            said = network.on(1, "ss", "-Htnio", "state", "established").replace("\n\t", " ")
            pauses = [int(re.search(r" rto:(\d+)", line)[1]) for line in said.splitlines()
                      if re.search(r"timer:\(on,[^,]*,([4-9]|\d\d)\)", line)]
        if network.on(1, "python3", "-c", LIMITS).strip() == "1":
            assert max(pauses) <= 1000, pauses
        network.do("undrop")
        network.do("until", 1, "tx", sent(network, 1) + 20 * MIB)  # it goes on
        for host in (1, 2):
            network.do("off", host)
        for rank in ranks:
            rank.communicate(timeout=LIMIT_S)


# What a stranger does with a port, from a host that is none of the job's.
STRANGER = r"""
import socket, struct, sys, time
ports, seconds = [part.rsplit(":", 1) for part in sys.argv[1].split(",")], float(sys.argv[2])
hello = b"\0" + struct.pack("<I", 0x3C85F7CE)
def text(value): return struct.pack("<Q", len(value)) + value
def words():
    yield b""
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00" + bytes(512)
    yield bytes(range(256)) * 16
    yield hello + b"\1" + text(b"/lockstep/poison") + text(b"x" * 100_000)
    yield hello + b"\1" + struct.pack("<Q", 2 ** 62)
end, count = time.monotonic() + seconds, 0
while count == 0 or time.monotonic() < end:
    held = []
    for host, port in ports:
        for word in words():
            for _ in range(20):
                try:
                    held.append(socket.create_connection((host, int(port)), 30))
                    held[-1].sendall(word)
                except OSError:
                    pass
                count += 1
    for one in held:
        one.close()
print(count)
"""


def listening(network, hosts):
    return [f"10.77.0.{host}:{line.split()[3].rsplit(':', 1)[1]}" for host in range(1, hosts + 1)
            for line in network.on(host, "ss", "-Htln").splitlines()]


def sent(network, host):
    return int(network.on(host, "awk", "/eth0:/ {print $10}", "/proc/net/dev"))


def descriptors(network, host):
    return int(network.on(host, "sh", "-c", "for p in $(pidof bench_wire); do ls /proc/$p/fd; done | wc -l"))


def test_strangers_on_every_port_do_not_harm_a_job(folder):
    with Hosts(folder, 3) as network:
        both = [network.launch(host, BIN / "lockstep", "run", "--nnodes", 2, "--nproc-per-node", 2,
                               "--rdzv-endpoint", "host1:29400", BIN / "bench_wire", MIB, 1_000_000_000)
                for host in (1, 2)]
        network.do("until", 2, "tx", 20 * MIB)  # all have met
        ports, before = listening(network, 2), descriptors(network, 1) + descriptors(network, 2)
        assert ports, "nobody listens"
        seconds = float(os.environ.get("LOCKSTEP_STRANGER_SECONDS", 0))
        connections = network.on(3, "python3", "-c", STRANGER, ",".join(ports), seconds, limit_s=LIMIT_S + seconds)
        print("    ", connections.strip(), "connections to", ", ".join(ports))
        network.do("until", 2, "tx", sent(network, 2) + 20 * MIB)  # it goes on
        # Of strangers that are gone none is left but those that nobody has heard of yet.
        after = descriptors(network, 1) + descriptors(network, 2)
        assert after <= before + 8, (before, after)
        network.on(1, "pkill", "-TERM", "-x", "lockstep")
        for launcher in both:
            launcher.await_end()
            assert "Error" not in launcher.text, launcher


if __name__ == "__main__":
    run_cases([case for name, case in list(globals().items()) if name.startswith("test_")])
