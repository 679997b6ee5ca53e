"""Answers as tools/tau2/lockstep_tau2.py does, of a world with one task; a tool's name says what goes wrong."""
import json
import os
import sys
import time

calls = {}  # of each world

for line in sys.stdin:
    request = json.loads(line)
    op, reply = request["op"], {"rid": request["rid"], "ok": True}
    if op == "hello":
        reply.update(protocol=1, tau2="fake", domains=["airline"])
    elif op == "tasks":
        try:
            reply["ids"] = [task["id"] for task in json.load(open(request["file"]))] if "file" in request else ["0"]
        except ValueError as error:
            reply.update(ok=False, error=f"ValueError: {error}")
    elif op == "gold":
        reply.update(actions=[{"name": "f", "arguments": {"a": [1]}, "requestor": "assistant"}], told=["so"])
    elif op == "reset":
        calls[request["sid"]] = 0
        reply.update(policy="p", tools=[{"type": "function"}], user_tools=[],
                     scenario="Reason for call: " + request.get("file", "help"), ticket=None,
                     basis=["DB"], guidelines="Be brief.\n")
        if request["solo"]:
            reply.update(scenario="", ticket="mend the phone")
    elif op == "call":
        name = request["call"]["name"]
        calls[request["sid"]] += 1
        if name == "count":
            reply["content"] = str(calls[request["sid"]])
        if name == "process":
            reply["content"] = str(os.getpid())
        if name in ("talk", "whisper"):
            print("x" * (1 << 20 if name == "talk" else 1000), file=sys.stderr)
        if name == "hang":
            time.sleep(1000)
        if name == "die":
            print("my last words", file=sys.stderr)
            sys.exit(3)
        if name == "garbage":
            print("{", flush=True)
            continue
        if name == "long":
            sys.stdout.write("x" * (17 << 20))
        if name == "late":
            reply["rid"] -= 1
        if name == "refuse":
            reply.update(ok=False, error="KeyError: 'x'")
        if name == "shape":
            reply["content"] = 1
        reply.setdefault("content", json.dumps(request["call"]["arguments"]))
        reply["error"] = name == "fail"
    elif op == "reward":
        reply.update(reward=1.0 if request["why"] == "user_stop" else 0.0, breakdown={"DB": 1.0},
                     note=str(len(request["messages"])))
    elif op == "hash":
        reply["hash"] = ["a", None]
    print(json.dumps(reply), flush=True)
