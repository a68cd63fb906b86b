"""The chat template of a model: conversations as text and tokens, with the places of the answers."""

import re
from typing import Any, NamedTuple


class Rendered(NamedTuple):
    """A row as text. Each of its answers is a pair: the text before the answer, and the text until the end of the answer."""

    text: str
    answers: list[tuple[str, str]]
    problem: str = ""


def tokenize(rows: list[Rendered], tokenizer: Any, learn_all: bool) -> list[tuple[list[int], list[int], str]]:
    """Return token ids, labels and the problem of each row. With `learn_all` all tokens are learned, and not only the answers.

    Parts of a text that are tokenized separately may have other tokens than the whole text. The whole text is therefore
    tokenized. Its beginnings are tokenized too, from their last special token on, to find the places of the answers.
    """
    # Tokenizers split a text at these tokens before anything else. A slow one has none.
    added = tokenizer.added_tokens_decoder.values() if tokenizer.is_fast else ()
    words = sorted((token.content for token in added if not (token.normalized or token.single_word)), key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, words)) or r"(?!)")
    find_last = lambda text: max((found.start() for found in special.finditer(text)), default=0)
    encoded = tokenizer([row.text for row in rows], add_special_tokens=False, verbose=False)
    beginnings = {text: find_last(text) for row in rows for answer in row.answers for text in answer}
    tails = list({text[start:]: 0 for text, start in beginnings.items()})
    tokens = dict(zip(tails, tokenizer(tails, add_special_tokens=False)["input_ids"])) if tails else {}

    def compare(number: int, text: str) -> tuple[int, int]:
        """Return how many tokens the beginning of a row has, and how many of these are the same in the whole row."""
        start, ids = beginnings[text], encoded["input_ids"][number]
        place = (encoded.char_to_token(number, start) or 0) if start else 0
        tail = tokens[text[start:]]
        pairs = enumerate(zip(tail, ids[place : place + len(tail)]))
        same = next((i for i, (a, b) in pairs if a != b), min(len(tail), len(ids) - place))
        return place + len(tail), place + same

    done = []
    for number, row in enumerate(rows):
        ids, problem = [] if row.problem else encoded["input_ids"][number], row.problem
        labels = list(ids) if learn_all else [-100] * len(ids)
        for before, until in row.answers:
            start, same = compare(number, before)
            if same < start:
                # In use the prompt is tokenized alone, so the model would get tokens that it was not trained on.
                problem = "the tokens of its prompt change if the answer follows, which often begins with white space"
            end = compare(number, until)[1]  # a token that also contains a part of the next turn is not learned
            labels[start:end] = ids[start:end]
        done.append(([], [], problem) if problem else (ids, labels, ""))
    return done
