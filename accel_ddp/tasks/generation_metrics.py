"""Texts that a model writes for texts: what is cut of them, how they are searched for, and how near they are to the right ones.

Nothing here asks a hub.
"""

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_ddp.errors import UserError

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import datasets


def are_cut(tokenizer: Any, texts: list[str], rows: list[list[int]], max_length: int) -> list[bool]:
    """Of each text, whether its row of at most `max_length` tokens is not the whole of it."""
    return [len(row) == max_length and len(tokenizer(text)["input_ids"]) > max_length for text, row in zip(texts, rows)]


def say_what_is_cut(tables: list["datasets.Dataset"], cfg: Any) -> list["datasets.Dataset"]:
    """Training and evaluation rows without the columns that say whether the option of that name has cut something."""
    columns = {"max_length": "sources", "max_target_length": "targets"}
    for option, what in columns.items():
        for rows, name in zip(tables, ("training", "evaluation")):
            if number := sum(rows[option][:]):
                log.info(f"--{option} {getattr(cfg, option)}: {number:,} of {len(rows):,} {name} {what} are cut.")
    if number := sum(len(row) > cfg.max_new_tokens for row in tables[1]["labels"][:]):
        log.info(f"--max_new_tokens {cfg.max_new_tokens}: too few to write {number:,} of {len(tables[1]):,} evaluation targets.")
    return [rows.remove_columns(list(columns)) for rows in tables]


def require_decoder(model: Any, cfg: Any) -> None:
    """A UserError where the model has no decoder that takes targets, or one that takes only shorter ones."""
    if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise UserError(f"--model {cfg.model}: {type(model).__name__} does not say what its decoder reads. Use T5, BART or kin.")
    most = getattr(model.config, "max_position_embeddings", None) or float("inf")
    for option in ("max_length", "max_target_length", "max_new_tokens"):
        if getattr(cfg, option) > most:
            raise UserError(f"--{option} {getattr(cfg, option)}: {cfg.model} takes at most {most} tokens.")


def generation_config(known: Any, max_new_tokens: int, num_beams: int) -> Any:
    """A search of `num_beams`. Of the settings that are `known` those stay that say which tokens begin, end or are forbidden.

    Others, a least length or a penalty, were chosen for what the model did before.
    """
    from transformers import GenerationConfig

    kept = ("_token_id", "bad_words_ids", "suppress_tokens")
    tokens = {name: value for name, value in known.to_dict().items() if name.endswith(kept) and value is not None}
    return GenerationConfig(max_new_tokens=max_new_tokens, num_beams=num_beams, do_sample=False, **tokens)


def decoded(ids: np.ndarray, tokenizer: Any) -> list[str]:
    """Texts of rows of tokens that were filled up with -100."""
    return tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)


def of_texts(outputs: list[str], references: list[str]) -> dict[str, float]:
    """exact_match and rouge_l are shares from 0 to 1; bleu and chrf, of the whole corpus, go from 0 to 100, as is usual.

    ROUGE-L looks at the letters a-z and digits only: of other scripts it sees nothing.
    """
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    outputs, references = ([text.strip() for text in texts] for texts in (outputs, references))
    pairs, rouge = list(zip(outputs, references, strict=True)), RougeScorer(["rougeL"])
    return {
        "exact_match": sum(output == reference for output, reference in pairs) / len(pairs),
        "bleu": sacrebleu.corpus_bleu(outputs, [references], force=True).score,  # force: no advice about tokenised texts
        "chrf": sacrebleu.corpus_chrf(outputs, [references]).score,
        "rouge_l": sum(rouge.score(reference, output)["rougeL"].fmeasure for output, reference in pairs) / len(pairs),
    }


def table_of_samples(sources: list[str], targets: list[str], outputs: list[str], number: int = 3) -> str:
    """The first few, to look at."""
    rows = zip(sources[:number], targets[:number], outputs[:number])
    return "\n".join(f"source  {source}\ntarget  {target}\noutput  {output}\n" for source, target, output in rows)
