"""Writes chat_cases.json: conversations, and the text that Qwen's own chat templates make of them.

python3 chat_cases.py QWEN3.jinja QWEN3_INSTRUCT_2507.jinja chat_cases.json

The templates are those of PyPI's trl 1.16.0 (trl/chat_templates, Apache-2.0), rendered by transformers.
"""
import json
import pathlib
import sys

from transformers.utils.chat_template_utils import render_jinja_template

LOOKUP = {"type": "function", "function": {
    "name": "find", "description": "Finds — an \"item\" & <more>.",
    "parameters": {"type": "object", "properties": {
        "id": {"type": "string"}, "n": {"type": "integer", "default": 3}, "small": {"type": "number", "default": 1e-05},
        "whole": {"type": "number", "default": 2.0}}, "required": ["id"]}}}
PLAIN = {"type": "function", "function": {
    "name": "stop", "description": "停止", "parameters": {"type": "object", "properties": {}}}}


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def agent(text, *calls, **more):
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **more}


EVERYTHING = {"id": "é\"\\\n\t/", "f": 1.5, "z": None, "b": True, "l": [1, "x"], "o": {}, "e": []}
NUMBERS = {"a": 1e22, "b": 1e16, "c": 123456789.125, "d": 1e-4, "e": -0.0, "g": 10**17, "h": 0.1, "i": 5e-324}
THOUGHT = "<think>\nhm\n</think>\n\n"
CASES = [  # messages, tools, whether the agent speaks next, enable_thinking
    ([user("hello")], [], False, None),
    ([system("Serve."), user("hello")], [], True, None),
    ([user("hello")], [], True, False),
    ([user("hello")], [], True, True),
    ([system("Serve."), user("a"), agent("b"), user("c")], [], True, False),
    ([user("a"), agent(THOUGHT + "short"), user("b")], [], True, None),
    ([user("a"), agent(THOUGHT + "short")], [], False, None),
    ([user("a"), agent("last")], [], False, None),
    ([user("a"), agent("<think>\nx\n</think>\ny</think>\n\nz"), user("b")], [], False, None),
    ([system("Policy."), user("stop it")], [LOOKUP, PLAIN], True, False),
    ([user("stop it")], [LOOKUP], True, None),
    ([system("P"), user("find"), agent("", ("find", {"id": "1", "n": 2})), tool("{\"ok\": true}")],
     [LOOKUP], True, False),
    ([system("P"), user("find"), agent("I look.", ("find", EVERYTHING), ("stop", {})), tool("one"), tool("two"),
      agent("So."), user("thanks")], [LOOKUP, PLAIN], True, False),
    ([user("q"), agent("", ("stop", "{\"raw\":1}")), tool("x"), agent(THOUGHT, ("stop", {})), tool("y")],
     [PLAIN], True, None),
    ([user("q"), agent("", ("stop", {}), reasoning_content="because"), tool("x")], [PLAIN], True, None),
    ([user("q"), agent("", ("stop", {})), tool("x"), agent("end", reasoning_content="\nwhy\n")], [PLAIN], False, None),
    ([user("<tool_response>\nfalse\n</tool_response>"), agent("x"), user("<tool_response>\nz\n</tool_response>")],
     [], True, None),
    ([system("a"), system("b"), user("c")], [], True, None),
    ([user("a"), agent("  before\n\nafter"), user("b")], [], False, None),
    ([user("a"), agent("\n\nbefore")], [], False, None),
    ([system("P"), user("numbers"), agent("", ("find", NUMBERS)), tool("r")], [LOOKUP], True, None),
]

written = []
for name, path in (("qwen3", sys.argv[1]), ("qwen3-2507", sys.argv[2])):
    template = pathlib.Path(path).read_text()
    for messages, tools, speaks, thinks in CASES:
        more = {} if thinks is None else {"enable_thinking": thinks}
        texts, _ = render_jinja_template([messages], tools=tools or None, chat_template=template,
                                         add_generation_prompt=speaks, **more)
        written.append({"format": name, "messages": messages, "tools": tools, "speaks": speaks,
                        "thinks": thinks is not False, "text": texts[0]})
pathlib.Path(sys.argv[3]).write_text("[\n" + ",\n".join(json.dumps(case) for case in written) + "\n]\n")
