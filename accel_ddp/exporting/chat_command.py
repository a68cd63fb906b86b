"""The command `accel-ddp chat`: talk to a model in the terminal, or through a pipe with one question per line."""

import contextlib
import copy
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from accel_ddp.config.commands import COMMANDS, parser_of
from accel_ddp.config.option_values import CHAT_TEMPLATES
from accel_ddp.errors import UserError
from accel_ddp.exporting import trained_model
from accel_ddp.exporting.predict_command import check_options
from accel_ddp.ranks.reporting import hide_torchao
from accel_ddp.tasks.chat_rows import Chat, UnusableRow, read_tools

CALL = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\[?\{")  # where the calls of an answer begin


def main(words: list[str]) -> int:
    given = parser_of("chat").parse_args(words)
    check_options(given)
    hide_torchao()
    try:
        tools = read_tools(Path(given.tools).read_text("utf-8"), "tools") if given.tools else []
    except (OSError, UnicodeDecodeError, UnusableRow) as error:
        reason = getattr(error, "strerror", "") or str(error).replace("\t", ": ")
        needed = "Give a list of tools in JSON: name, description, parameters."
        raise UserError(f"--tools {given.tools}: {reason}. {needed}") from error
    with tempfile.TemporaryDirectory() as scratch:
        found = trained_model.find(given.model, Path(scratch))
        if found.kind != "answers":
            instead = f"accel-ddp predict {given.model} --input FILE --output FILE"
            raise UserError(f"{given.model}: predicts {found.kind} and cannot chat. Use: {instead}")
        if not (found.chat_template or given.chat_template or given.plain):
            known = f"--chat_template {', '.join(CHAT_TEMPLATES)} or a .jinja file"
            raise UserError(f"{given.model}: has no chat template. Give the one of its training ({known}), or --plain.")
        _talk(Conversation(trained_model.export(found, Path(scratch)), vars(given), tools))
    return 0


class Conversation:
    def __init__(self, found: trained_model.TrainedModel, options: dict[str, Any], tools: list[dict[str, Any]]):
        from accel_ddp.exporting import predictors

        self.options, self.system, self.tools = options, options["system"], tools
        self.predictor = predictors.Predictor(found, {**options, "max_length": 0})
        self.messages: list[dict[str, Any]] = []
        self.number = 0  # of the next answer

    def answer(self, message: dict[str, Any]) -> list[str]:
        """Print the answer to a message while it is generated. Return the names of the tools that it calls."""
        self.messages = [*self.messages, message] if not self.options["plain"] else [message]
        try:
            text = self._generate(self._prompt())
        except UnusableRow as error:
            self.messages.pop()
            print("error:", str(error).replace("\t", ": "), file=sys.stderr)
            return []
        calls = find_calls(text, self.tools)
        content = {"content": CALL.split(text)[0].rstrip(), "tool_calls": calls} if calls else {"content": text}
        self.messages.append({"role": "assistant", **content})
        for call in calls:
            print(f"tool call: {call['function']['name']} {json.dumps(call['function']['arguments'], ensure_ascii=False)}")
        return [call["function"]["name"] for call in calls]

    def _prompt(self) -> list[int]:
        """Return the tokens before the answer. The oldest turns are left out if they do not fit into the model's context."""
        most = self.predictor.limit - min(self.predictor.generation.max_new_tokens, self.predictor.limit // 4)
        while True:
            system = [{"role": "system", "content": self.system}] if self.system else []
            chat = Chat([*system, *self.messages], self.tools or None)
            ids = self.predictor.prompts.ids(self.messages[0]["content"] if self.options["plain"] else chat)
            later = [i for i, one in enumerate(self.messages) if one["role"] == "user"][1:]
            if len(ids) <= most:
                return ids
            if not later:
                raise UnusableRow(f"the question has {len(ids):,} tokens, and the model accepts {most:,} before an answer")
            print("(the oldest turn is left out: the model's context is full)", file=sys.stderr)
            self.messages = self.messages[later[0] :]

    def _generate(self, ids: list[int]) -> str:
        import torch
        from transformers import TextStreamer

        from accel_ddp.exporting.predictors import sampling

        parts: list[str] = []

        class Stream(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                parts.append(text)
                print(text, end="\n" if stream_end else "", flush=True)

        use, inputs = self.predictor, torch.tensor([ids], device=self.predictor.device)
        stream, generation = Stream(use.tokenizer, skip_prompt=True, skip_special_tokens=True), copy.deepcopy(use.generation)
        generation.max_new_tokens = min(generation.max_new_tokens, use.limit - len(ids))
        more = sampling(self.options, [self.number], use.device)
        self.number += 1
        try:
            with torch.inference_mode():
                mask = torch.ones_like(inputs)
                use.model.generate(inputs, attention_mask=mask, generation_config=generation, streamer=stream, **more)
        except KeyboardInterrupt:  # what was generated stays in the conversation
            stream.end()
            print("(stopped)")
        return "".join(parts)

    def command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name == "/system":
            self.system = text.strip()
        elif name in ("/reset", "/undo"):
            places = [i for i, one in enumerate(self.messages) if one["role"] == "user"]
            self.messages = self.messages[: places[-1]] if name == "/undo" and places else []
        else:
            print(COMMANDS["chat"]["keys"], file=sys.stderr)


def find_calls(text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of known tools in an answer: objects in JSON with a name and arguments, whatever is around them."""
    names, calls, at = {tool.get("function", {}).get("name") for tool in tools}, [], 0
    while names and (at := text.find("{", at)) >= 0:
        end = at + 1
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # a name may be a list, and objects nested deeply
            value, end = json.JSONDecoder().raw_decode(text, at)
            arguments = value.get("arguments", value.get("parameters"))
            if value.get("name") in names and isinstance(arguments, dict):
                calls.append({"type": "function", "function": {"name": value["name"], "arguments": arguments}})
        at = end
    return calls


def _talk(chat: Conversation) -> None:
    is_terminal, was_interrupted, called = sys.stdin.isatty(), False, list[str]()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline as readline  # lines can be edited
        for tool in chat.tools:
            print(f"tool: {tool.get('function', tool).get('name')}  {tool.get('function', tool).get('description', '')}")
        print("Type a question. /help shows the commands.")
    while True:
        try:
            line = input((f"result of {called[0]}> " if called else "> ") * is_terminal).strip()
            was_interrupted = False
            if line == "/exit":
                return
            if called:
                result = {"role": "tool", "name": called.pop(0), "content": line}
                if called:  # the model continues when it has all results
                    chat.messages.append(result)
                else:
                    called = chat.answer(result)
            elif line.startswith("/"):
                chat.command(line)
            elif line:
                called = chat.answer({"role": "user", "content": line})
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            if was_interrupted or not is_terminal:
                return
            was_interrupted = True
            print("(Ctrl-C again or Ctrl-D exits)")
