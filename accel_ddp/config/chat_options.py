"""The options of recipes that train a causal language model on chats, prompts and answers."""

from dataclasses import dataclass
from typing import Literal

from accel_ddp.config.option_values import check_streaming, check_template
from accel_ddp.config.options import option
from accel_ddp.config.train_config import RecipeConfig


@dataclass(kw_only=True)
class ChatConfig(RecipeConfig):
    """How rows become chats and tokens, and what is chosen by the size of the model and its memory."""

    model: str = option("builtin:tiny-llama", "Hub name, folder, or built-in (pretrained: builtin:SmolLM2-135M-Instruct)")
    messages_column: str = option("", "column of chats; default: messages or conversations", group="data")
    prompt_column: str = option("", "column of prompts; default: prompt, instruction (with input) or question", group="data")
    answer_column: str = option("", "column of answers; default: answer, output, completion or response", group="data")
    separator: str = option("", r"text between prompt and answer without a chat template, for example '\n'", group="data")
    max_length: int | Literal["auto"] = option(
        "auto", "tokens per row; longer rows are truncated; auto: from the data, up to the model's limit", group="data", at_least=1,
        legacy="auto",
    )  # fmt: skip
    chat_template: str = option(
        "", "for models without one: plain, chatml, llama3, gemma, mistral or a .jinja file", group="data"
    )
    template_date: str = option(
        "auto", "YYYY-MM-DD, for chat templates that write the date; auto: today", group="data", legacy="auto"
    )
    lora_targets: tuple[str, ...] = option(("all-linear",), "layers that get adapters; all-linear: all except the head")
    micro_batch_size: int | Literal["auto"] = "auto"
    eval_batch_size: int | Literal["auto"] = option(
        "auto", "examples per rank in evaluations; auto: by memory, on CPUs 16", legacy=16
    )
    gradient_checkpointing: bool | Literal["auto"] = option(
        "auto", "recompute activations: less memory, about a third more time; auto: if a step does not fit otherwise",
        legacy=False,
    )  # fmt: skip

    def validate(self) -> None:
        super().validate()
        check_template(self.chat_template)
        if getattr(self, "streaming", False):
            check_streaming(self)


@dataclass(kw_only=True)
class PairConfig(ChatConfig):
    """How rows with a chosen and a rejected answer are read and learned."""

    dataset: str = "builtin:preferences"
    prompt_column: str = option(
        "", "column of prompts; default: prompt, instruction, question or conversations; chats may include their prompts"
    )
    chosen_column: str = option("chosen", "column of the better answers", group="data")
    rejected_column: str = option("rejected", "column of the worse answers", group="data")
    epochs: float = 1.0
    lr: float | Literal["auto"] = option("auto", "peak learning rate; auto: by the size of the model and --lora_r", legacy="auto")
    warmup_ratio: float = 0.1
    train_on_prompts, train_on, packing = False, "all", "off"  # what `sft` has as options
    texts_per_item = 2  # for the estimate of memory
