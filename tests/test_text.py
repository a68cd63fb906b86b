"""Text for people, and the options in a command line."""

from accel_ddp.text import (
    counted,
    did_you_mean,
    did_you_mean_path,
    format_bytes,
    format_clock,
    format_seconds,
    format_si,
    listed,
    nearest,
    plural,
    ranks_text,
    rough_seconds,
    shorten,
    table,
)
from accel_ddp.words import Option, find_options, group_values, has_option, name_of, script_at, split_option, value_of, without


def test_a_number_and_its_noun_agree():
    assert [counted(n, "rank") for n in (0, 1, 2, 1000)] == ["0 ranks", "1 rank", "2 ranks", "1,000 ranks"]
    assert [counted(2, noun) for noun in ("process", "micro-batch", "GPU")] == ["2 processes", "2 micro-batches", "2 GPUs"]
    assert f"1.5 {plural(1.5, 'minute')}" == "1.5 minutes"
    assert [ranks_text([3]), ranks_text([0, 1]), ranks_text(range(10))] == [
        "rank 3", "ranks 0, 1", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"]  # fmt: skip
    assert [listed("abc"), listed("abcde"), listed("abc", 1, "; ")] == ["a, b, c", "a, b, c and 2 more", "a and 2 more"]


def test_numbers_have_three_digits_and_a_unit():
    assert [format_bytes(n) for n in (10, 1500, 5 << 20, 1023 << 20, 1.5 * 2**30, 143771 << 20)] == [
        "10 B", "1.46 KiB", "5 MiB", "1023 MiB", "1.5 GiB", "140 GiB"]  # fmt: skip
    seconds = (0, 0.00001, 0.0481, 0.99949, 0.9996, 12.34, 59.96, 800, 7200, 7260, 200_000, float("nan"))
    assert [format_seconds(n) for n in seconds] == [
        "0 s", "10 us", "48.1 ms", "999 ms", "1 s", "12.3 s", "60 s", "13 min 20 s", "2 h", "2 h 1 min", "2 d 7 h", "nan"]  # fmt: skip
    rough = (0.00561, 0.0481, 0.346, 1.02, 12.34, 800)
    assert [rough_seconds(n) for n in rough] == ["5.6 ms", "48 ms", "346 ms", "1.0 s", "12 s", "13 min 20 s"]
    assert [format_clock(n) for n in (7, 187, 7387)] == ["0:07", "3:07", "2:03:07"]
    assert [format_si(n) for n in (12.3e9, 1500, 0.0002, 1e-9)] == ["12.3 G", "1.5 k", "200 u", "0.001 u"]


def test_long_texts_end_in_dots_and_tables_are_aligned():
    assert [shorten("abcdef", 6), shorten("abcdefg", 6), shorten("abcdefg", 6, "…")] == ["abcdef", "abc...", "abcde…"]
    rows = [["name", "ms"], ["a", "10"], ["longer", "5"]]
    assert table(rows) == ["name    ms", "a       10", "longer  5"]
    assert table(rows, left=1) == ["name    ms", "a       10", "longer   5"]
    assert table([]) == []


def test_the_nearest_name_is_suggested_only_if_it_is_similar():
    assert nearest("clasify", ["classify", "embed"]) == "classify"
    assert nearest("clasify", ["classify", "embed"], cutoff=0.95) == nearest("x", ["classify"]) == ""
    assert did_you_mean("stepz", ["steps"], "--{}") == " Did you mean --steps?"
    assert did_you_mean("zzz", ["steps"]) == ""


def test_one_name_of_a_path_may_be_misspelled(tmp_path):
    (tmp_path / "runs" / "mine" / "model").mkdir(parents=True)
    (tmp_path / "runz.sh").touch()
    for given, meant in {
        "runs/mine/modle": "runs/mine/model",
        "runz/mine/model": "runs/mine/model",
        "runs/mien/x": "runs/mine",
    }.items():
        assert did_you_mean_path(tmp_path / given) == f" Did you mean {tmp_path / meant}?"
    assert did_you_mean_path(tmp_path / "zzz" / "mine") == did_you_mean_path("/") == ""


WORDS = ["--num-ranks=2", "--lr", "-1", "--names", "a", "b", "--no-tf32", "--lr=", "--config"]


def test_an_option_is_found_with_dashes_underscores_and_an_equals_sign():
    assert [name_of(word) for word in WORDS] == ["num_ranks", "lr", "", "names", "", "", "no_tf32", "lr", "config"]
    assert [split_option(word) for word in ("--a-b=c=d", "--a", "a=b", "-m", "--")] == [
        ("a_b", "c=d"), ("a", None), ("", None), ("", None), ("", None)]  # fmt: skip
    found = find_options(WORDS, ["num_ranks", "lr", "config"])
    assert found == [
        Option("num_ranks", "2", 0, 1),
        Option("lr", "-1", 1, 3),
        Option("lr", "", 7, 8),
        Option("config", None, 8, 9),
    ]
    assert without(WORDS, found) == ["--names", "a", "b", "--no-tf32"]
    assert find_options(["--a", "--b", "--b", "1"], ["a", "b"]) == [Option("a", "--b", 0, 2), Option("b", "1", 2, 4)]
    assert without(["--a", "--b"], []) == ["--a", "--b"]


def test_the_last_value_of_an_option_wins_and_a_missing_one_is_empty():
    assert [value_of(WORDS, name) for name in ("num_ranks", "lr", "config", "steps")] == ["2", "", "", None]
    assert value_of(["--lr", "1", "--lr", "2"], "lr") == "2"
    assert [has_option(WORDS, name) for name in ("tf32", "lr", "steps")] == [True, True, False]


def test_the_words_of_an_option_are_grouped_and_the_script_is_found():
    assert group_values(["x", *WORDS]) == [
        ("num_ranks", ["2"]), ("lr", ["-1"]), ("names", ["a", "b"]), ("no_tf32", []), ("lr", [""]), ("config", [])]  # fmt: skip
    assert [script_at(words, ["sft"]) for words in (["--a", "b.py", "sft"], ["--a", "sft"], ["--a"], [])] == [1, 1, 1, 0]
