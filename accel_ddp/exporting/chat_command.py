"""The command `accel-ddp chat`: talk to a model in the terminal, or through a pipe with one question per line."""

import argparse
import contextlib
import copy
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from accel_ddp.config.option_values import CHAT_TEMPLATES, check_template
from accel_ddp.errors import UserError
from accel_ddp.exporting import trained_model
from accel_ddp.exporting.predict_command import add_generation_options
from accel_ddp.tasks.chat_rows import Chat, UnusableRow, read_tools

HELP = """/reset         forget the conversation
/system TEXT   set the system prompt; without a text, remove it
/undo          forget the last question and its answer
/exit          end; Ctrl-D does the same. Ctrl-C stops an answer"""


def main(words: list[str]) -> int:
    """Run `accel-ddp chat` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="accel-ddp chat", description=f"{__doc__}\n\n{HELP}", formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "model", metavar="MODEL", help="an exported folder, adapters, a run, a checkpoint, or any folder or Hub name"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument("--tools", default="", metavar="FILE", help="a JSON file with a list of tools that the model may call")
    parser.add_argument("--plain", action="store_true", help="continue each text, without a chat template and without history")
    add_generation_options(parser)
    given = parser.parse_args(words)
    check_template(given.chat_template)
    tools = _read_tools(given.tools)
    with tempfile.TemporaryDirectory() as scratch:
        found = trained_model.find(given.model, Path(scratch))
        if found.kind != "answers":
            instead = f"accel-ddp predict {given.model} --input FILE --output FILE"
            raise UserError(f"{given.model}: predicts {found.kind} and cannot chat. Use: {instead}")
        if not (found.chat_template or given.chat_template or given.plain):
            raise UserError(
                f"{given.model}: has no chat template. Give the one it was trained with (--chat_template {', '.join(CHAT_TEMPLATES)} "
                "or a .jinja file), or --plain to continue texts."
            )
        _talk(Conversation(found, vars(given), tools))
    return 0


def _read_tools(path: str) -> list[dict[str, Any]]:
    try:
        return read_tools(Path(path).read_text("utf-8"), "tools") if path else []
    except (OSError, UnicodeDecodeError, UnusableRow) as error:
        reason = getattr(error, "strerror", "") or str(error).replace("\t", ": ").replace("the column tools", "the file")
        raise UserError(
            f"--tools {path}: {reason}. Give a JSON file with a list of tools: name, description, parameters."
        ) from error


class Conversation:
    """The model, and what was said so far."""

    def __init__(self, found: trained_model.TrainedModel, options: dict[str, Any], tools: list[dict[str, Any]]):
        import torch

        from accel_ddp.exporting import predictors

        self.options, self.system, self.tools, self.sampling = options, options["system"], tools, predictors.sampling
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = trained_model.load_tokenizer(found)
        self.prompts = predictors.Prompts(self.tokenizer, found, options["chat_template"])
        self.model = trained_model.load(found, options["dtype"], self.device)
        self.limit = predictors.context_length(self.model, self.tokenizer)
        self.generation = predictors.generation_config(self.model, self.tokenizer, options)
        self.messages: list[dict[str, Any]] = []
        self.number = 0  # of the next answer

    def answer(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Print the answer to a message while it is generated. Return the tool calls in it."""
        self.messages.append(message)
        try:
            ids = self._prompt()
        except UnusableRow as error:
            self.messages.pop()
            print(f"error: {str(error).partition(chr(9))[0]}.", file=sys.stderr)
            return []
        text = self._generate(ids)
        calls = find_calls(text, self.tools)
        before = re.split(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|[{\[]", text)[0].rstrip() if calls else text
        self.messages.append({"role": "assistant", "content": before, **({"tool_calls": calls} if calls else {})})
        for call in calls:
            print(f"tool call: {call['function']['name']}({json.dumps(call['function']['arguments'], ensure_ascii=False)})")
        return calls

    def _prompt(self) -> list[int]:
        """Return the tokens before the answer. The oldest turns are left out if they do not fit into the model's context."""
        if self.options["plain"]:
            self.messages = self.messages[-1:]
        while True:
            system = [{"role": "system", "content": self.system}] if self.system else []
            whole = self.messages[0]["content"] if self.options["plain"] else Chat([*system, *self.messages], self.tools or None)
            ids = self.prompts.ids(whole)
            if len(ids) <= self.limit - min(self.generation.max_new_tokens, self.limit // 4):
                return ids
            later = [i for i, one in enumerate(self.messages) if one["role"] == "user"][1:]
            if not later:
                raise UnusableRow(f"the question has {len(ids):,} tokens, and the model accepts {self.limit:,} with the answer")
            print("(the oldest turn is left out: the model's context is full)", file=sys.stderr)
            self.messages = self.messages[later[0] :]

    def _generate(self, ids: list[int]) -> str:
        import torch
        from transformers import TextStreamer

        parts: list[str] = []

        class Stream(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                parts.append(text)
                print(text, end="\n" if stream_end else "", flush=True)

        stream, inputs = (
            Stream(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            torch.tensor([ids], device=self.device),
        )
        more = (
            {"logits_processor": self.sampling(self.options, [self.number], self.device)} if self.options["temperature"] else {}
        )
        generation = copy.deepcopy(self.generation)
        generation.max_new_tokens = min(generation.max_new_tokens, self.limit - len(ids))
        self.number += 1
        try:
            with torch.inference_mode():
                mask = torch.ones_like(inputs)
                self.model.generate(inputs, attention_mask=mask, generation_config=generation, streamer=stream, **more)
        except KeyboardInterrupt:  # what was generated stays in the conversation
            stream.end()
            print("(stopped)")
        return "".join(parts)

    def command(self, line: str) -> None:
        """Carry out a line that begins with a slash."""
        name, _, text = line.partition(" ")
        if name == "/reset":
            self.messages = []
        elif name == "/system":
            self.system = text.strip()
        elif name == "/undo":
            last = max((i for i, one in enumerate(self.messages) if one["role"] == "user"), default=0)
            self.messages = self.messages[:last]
        else:
            print(HELP, file=sys.stderr)


def find_calls(text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of known tools in an answer: objects in JSON with a name and arguments, whatever is around them."""
    names, calls, at, decoder = {tool.get("function", {}).get("name") for tool in tools}, [], 0, json.JSONDecoder()
    while names and (at := text.find("{", at)) >= 0:
        end = at + 1
        with contextlib.suppress(ValueError):
            value, end = decoder.raw_decode(text, at)
            arguments = value.get("arguments", value.get("parameters"))
            if value.get("name") in names and isinstance(arguments, dict):
                calls.append({"type": "function", "function": {"name": value["name"], "arguments": arguments}})
        at = end
    return calls


def _talk(chat: Conversation) -> None:
    """Read questions, commands and results of tools until the input ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline as readline  # lines can be edited
        for tool in chat.tools:
            function = tool.get("function", tool)
            print(f"tool: {function.get('name')}  {function.get('description', '')}")
        print("Type a question. /help shows the commands.")
    calls: list[dict[str, Any]] = []
    was_interrupted = False
    while True:
        name = calls[0]["function"]["name"] if calls else ""
        try:
            line = input((f"result of {name}> " if name else "> ") if is_terminal else "").strip()
            was_interrupted = False
            if line == "/exit":
                return
            if line.startswith("/") and not name:
                chat.command(line)
            elif name:
                calls = calls[1:]
                result = {"role": "tool", "name": name, "content": line}
                if calls:
                    chat.messages.append(result)
                else:
                    calls = chat.answer(result)
            elif line:
                calls = chat.answer({"role": "user", "content": line})
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            if was_interrupted or not is_terminal:
                return
            was_interrupted = True
            print("(Ctrl-C again or Ctrl-D ends)")
