"""Sequence-to-sequence generation: truncated texts, the settings of the search, and metrics of generated texts."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.errors import UserError
from accel_ddp.records.eval_tables import Table
from accel_ddp.sources import data
from accel_ddp.sources.places import warn
from accel_ddp.tasks import tables

if TYPE_CHECKING:
    import datasets

    from accel_ddp.tasks.chat import Sample


def encode(rows: dict[str, list], tokenizer: Any, cfg: Any) -> dict[str, list]:
    """Return the tokens of sources and targets, both texts, and whether they were truncated, under the names of the options."""
    sources, targets = (data.read_texts(rows, column) for column in (cfg.source_column, cfg.target_column))
    prefixed = [cfg.prefix + source for source in sources]
    inputs = tokenizer(prefixed, truncation=True, max_length=cfg.max_length)
    labels = tokenizer(text_target=targets, truncation=True, max_length=cfg.max_target_length)["input_ids"]
    return {
        **{"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels},
        **{"source": sources, "target": targets},
        "max_length": find_truncated(tokenizer, prefixed, inputs["input_ids"], cfg.max_length),
        "max_target_length": find_truncated(tokenizer, targets, labels, cfg.max_target_length),
    }


def find_truncated(tokenizer: Any, texts: list[str], rows: list[list[int]], max_length: int) -> list[bool]:
    """Return for each text whether its row of tokens was truncated to `max_length`."""
    return [len(row) == max_length and len(tokenizer(text)["input_ids"]) > max_length for text, row in zip(texts, rows)]


def report_truncated(tables: list["datasets.Dataset"], cfg: Any) -> None:
    """Warn about truncated texts."""
    columns = {"max_length": "sources", "max_target_length": "targets"}
    for option, texts in columns.items():
        for rows, name in zip(tables, ("training", "evaluation")):
            if number := sum(rows[option][:]):
                warn(f"--{option} {getattr(cfg, option)}: {number:,} of {len(rows):,} {name} {texts} are truncated.")
    if number := sum(len(row) > cfg.max_new_tokens for row in tables[1]["labels"][:]):
        effect = f"{number:,} of {len(tables[1]):,} evaluation targets are longer and cannot be generated in full"
        warn(f"--max_new_tokens {cfg.max_new_tokens}: {effect}.")


def require_decoder(model: Any, cfg: Any) -> None:
    """Raise UserError if the model has no decoder, or if it has too few positions for the options."""
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        reason = f"{type(model).__name__} does not derive the inputs of its decoder from labels"
        raise UserError(f"--model {cfg.model}: {reason}. Use an encoder-decoder model such as T5 or BART.")
    most = getattr(model.config, "max_position_embeddings", None) or float("inf")
    for option in ("max_length", "max_target_length", "max_new_tokens"):
        if getattr(cfg, option) > most:
            raise UserError(f"--{option} {getattr(cfg, option)}: {cfg.model} accepts at most {most} tokens. Use {most}.")


def build_generation_config(current: Any, max_new_tokens: int, num_beams: int) -> Any:
    """Return the config of a search with `num_beams`. It keeps only the special and forbidden tokens of the `current` config.

    Other settings, such as a minimum length or a penalty, were chosen for an earlier task of the model.
    """
    from transformers import GenerationConfig

    kept = ("_token_id", "bad_words_ids", "suppress_tokens")
    tokens = {name: value for name, value in current.to_dict().items() if name.endswith(kept) and value is not None}
    return GenerationConfig(max_new_tokens=max_new_tokens, num_beams=num_beams, do_sample=False, **tokens)


def decode(ids: np.ndarray, tokenizer: Any) -> list[str]:
    """Return the texts of rows of tokens that are padded with -100."""
    return tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)


def text_metrics(outputs: list[str], references: list[str]) -> dict[str, float]:
    """Return exact_match, bleu, chrf and rouge_l, each from 0 to 100, as sacrebleu and papers report them."""
    return {name: text_metric(name, outputs, references) for name in ("exact_match", "bleu", "chrf", "rouge_l")}


def text_metric(name: str, outputs: list[str], references: list[str]) -> float:
    """Return a metric of generated texts, from 0 to 100. `ter` may be above 100.

    bleu, chrf and ter are computed over the corpus. ROUGE uses only the letters a-z and digits, so it is 0 for texts in other
    scripts.
    """
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    outputs, references = ([text.strip() for text in texts] for texts in (outputs, references))
    pairs = list(zip(outputs, references, strict=True))
    if name == "exact_match":
        return 100 * sum(output == reference for output, reference in pairs) / len(pairs)
    if name.startswith("rouge_"):
        kind = f"rouge{name[-1].upper()}"  # rougeL, rouge1
        rouge = RougeScorer([kind])
        return 100 * sum(rouge.score(reference, output)[kind].fmeasure for output, reference in pairs) / len(pairs)
    if name == "bleu":
        return sacrebleu.corpus_bleu(outputs, [references], force=True).score  # force: no warning about tokenized texts
    return {"chrf": sacrebleu.corpus_chrf, "ter": sacrebleu.corpus_ter}[name](outputs, [references]).score


def make_tables(
    number: int, sources: list[str], targets: list[str], outputs: list[str], losses: np.ndarray, samples: int = 0
) -> dict[str, Table]:
    """Return `number` generated texts of each group: those that equal their target, others, and those with the lowest chrF.

    If it is 0, return the first `samples` texts.
    """
    if not number:
        columns = {"prompt": sources, "reference": targets, "prediction": outputs, "loss": losses}
        return tables.of_samples(min(samples, len(sources)), columns) if samples else {}
    scores = text_scores(outputs, targets)
    describe = lambda items: {"prompt": [sources[i] for i in items], "reference": [targets[i] for i in items]}
    is_correct = np.array([output.strip() == target.strip() for output, target in zip(outputs, targets)])
    groups = {"is_correct": is_correct, "certainty": -np.array(scores), "worst": "lowest score"}
    return tables.of_predictions(number, describe, **groups, columns={"prediction": outputs, "score": scores, "loss": losses})


def make_answer_tables(samples: list["Sample"], answers: list[str], tokenizer: Any) -> dict[str, Table]:
    """Return the answers to the samples, and chrF of each."""
    if not samples:
        return {}
    ids = [tokenizer(sample.answer, add_special_tokens=False)["input_ids"] for sample in samples]
    wanted = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]  # without end tokens, as answers are decoded
    ends = [sample.prompt[-tables.LONGEST_TEXT :] for sample in samples]  # what is asked stands at the end of a chat
    columns = {"prompt": ends, "reference": wanted, "prediction": answers}
    return tables.of_samples(len(samples), {**columns, "score": text_scores(answers, wanted)})


def text_scores(outputs: list[str], references: list[str]) -> list[float]:
    """Return chrF of each text, from 0 to 100."""
    import sacrebleu

    return [sacrebleu.sentence_chrf(a.strip(), [b.strip()]).score for a, b in zip(outputs, references, strict=True)]


def add_end_tokens(model: Any, tokenizer: Any, rows: "datasets.Dataset") -> None:
    """Add the special tokens that end trained answers to the end tokens of the generation config, so served models stop there.

    A base model that learns a chat template ends its answers with a token, such as <|im_end|>, at which it did not stop before.
    """
    config, ends = model.generation_config, Counter[int]()
    for row in rows.select(range(min(len(rows), 1000))).select_columns(["input_ids", "labels"]):
        ids, labels = row["input_ids"], [*row["labels"], -100]
        last = [i for i in range(len(ids)) if labels[i] != -100 and labels[i + 1] == -100]
        # A newline may follow the token that ends a turn.
        ends.update(ids[i - 1] if i and not tokenizer.decode([ids[i]]).strip() else ids[i] for i in last)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    usual = [token for token, count in ends.items() if token in special and count >= 0.05 * ends.total()]  # not of truncated rows
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    found = [*dict.fromkeys(token for token in (*known, *usual) if token is not None)]
    config.eos_token_id = found if len(found) > 1 else next(iter(found), None)
    config.pad_token_id = tokenizer.pad_token_id if config.pad_token_id is None else config.pad_token_id
