"""What a run records about its machine and its warnings: right values, no cost, no exception, no hang of forked workers, and an end."""

import math
import multiprocessing
import os
import threading
import time

import psutil
import pytest
import torch

from accel_ddp.engine.step_numbers import SYSTEM, RankSample, split_samples
from accel_ddp.training import system_sample
from accel_ddp.training.system_sample import SystemSample, _Gpu

CPU = torch.device("cpu")
fork = multiprocessing.get_context("fork")


def until(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def spin(memory: int) -> None:
    held = bytearray(os.urandom(1) * memory)
    while held:
        pass


def test_the_values_include_data_workers_and_the_thread_ends(monkeypatch):
    monkeypatch.setattr(system_sample, "EVERY_SECONDS", 0.2)
    before = threading.active_count()
    with SystemSample(CPU) as system:
        value = lambda name: system.latest[SYSTEM.index(name)]
        until(lambda: value("cpu") == value("cpu"))
        alone = value("memory")
        assert alone == pytest.approx(psutil.Process().memory_info().rss, rel=0.3)
        assert value("host_memory") == pytest.approx(psutil.virtual_memory().percent / 100, abs=0.2)
        assert all(math.isnan(value(name)) for name in SYSTEM if name.startswith("gpu"))
        worker = fork.Process(target=spin, args=(200 << 20,), daemon=True)
        worker.start()
        until(lambda: value("memory") > alone + (200 << 20))
        until(lambda: value("cpu") > 0.1)  # other processes of this machine use its cores too
        assert value("cpu") < 3
        worker.kill()
        until(lambda: value("memory") < alone + (100 << 20))
        assert worker in multiprocessing.active_children() or worker.exitcode == -9, "its exit code was not collected"
    until(lambda: threading.active_count() == before)


def test_a_measurement_that_fails_is_nan_and_the_next_one_is_tried(monkeypatch):
    monkeypatch.setattr(system_sample, "EVERY_SECONDS", 0.05)
    with SystemSample(CPU) as system:
        until(lambda: system.latest[-1] == system.latest[-1])
        with monkeypatch.context() as broken:
            broken.setattr(psutil, "virtual_memory", None)
            until(lambda: math.isnan(system.latest[-1]))
            assert system.latest[SYSTEM.index("memory")] > 0, "the other values are still known"
        until(lambda: system.latest[-1] == system.latest[-1])
        assert system.thread.is_alive()


def test_a_machine_without_a_driver_has_no_values_of_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    gpu = _Gpu("00000000-0000-0000-0000-000000000000")
    assert gpu.nvml is not None, "nvidia-ml-py is installed"
    assert all(map(math.isnan, gpu.measure()))
    gpu.nvml = None  # without the package
    assert all(map(math.isnan, gpu.measure()))


def imports_again() -> None:
    import psutil

    psutil.virtual_memory()


def test_workers_that_are_forked_while_the_thread_measures_do_not_hang(monkeypatch):
    monkeypatch.setattr(system_sample, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(system_sample, "FIRST_SECONDS", 0.0)
    with SystemSample(CPU):
        for _ in range(30):
            worker = fork.Process(target=imports_again)
            worker.start()
            worker.join(120)
            assert worker.exitcode == 0


def test_a_measurement_takes_less_than_a_thousandth_of_its_interval_in_cpu_time():
    system = SystemSample(CPU)
    system.is_closed.set()
    began = time.thread_time()
    for _ in range(50):
        system._measure()
    assert (time.thread_time() - began) / 50 < system_sample.EVERY_SECONDS / 1000


def test_lines_about_1000_ranks_are_rare_and_include_all_steps(tmp_path):
    """A line of 190 KB in every step would take 4 % of steps of 0.5 s on the main rank, for which all others wait."""
    from accel_ddp.config.train_config import TrainConfig
    from accel_ddp.engine.step_numbers import Numbers, Pace
    from accel_ddp.observe.log_hook import JsonlLog
    from accel_ddp.records.run_log import read_log

    for ranks, expected in ((1000, [1, 50]), (64, list(range(1, 51)))):
        (tmp_path / str(ranks)).mkdir()
        log = JsonlLog(TrainConfig(output_dir=str(tmp_path / str(ranks)), log_every=1))
        log.on_start(0, 50, {})
        for step in range(1, 51):
            samples = [RankSample(step, *[float(step)] * 6, *system_sample.UNKNOWN)] * ranks
            log.on_update(Numbers(step, 1e-5, 1.0, 1.0, 8, 0, 0, 0.0, 1.0, samples), Pace(1.0, 0.0, 0.0, None))
        lines = [event for event in read_log(tmp_path / str(ranks) / "log.jsonl") if event["event"] == "ranks"]
        assert [line["last_step"] for line in lines] == expected
        assert [line["first_step"] for line in lines] == [1, *(step + 1 for step in expected[:-1])]
        assert {value for line in lines for value in line["data"]} == {1.0}, "seconds per step"
        assert all(len(line["data"]) == ranks and line["system"] == {} for line in lines)


def test_the_sum_of_all_ranks_contains_the_sample_of_each():
    from accel_ddp.engine.step_sums import append_sample
    from accel_ddp.ranks.team import Team

    numbers, total = torch.tensor([8.0, 0.0, 0.0, 0.0], dtype=torch.float64), 0
    samples = [RankSample(7.0, *[rank + 0.5] * 6, *[math.nan] * 5, 1.0, 2.0, 0.5) for rank in range(3)]
    for rank, sample in enumerate(samples):
        total = total + append_sample(numbers, sample, Team(3, rank))
    assert total[:4].tolist() == [24.0, 0.0, 0.0, 0.0]
    assert str(split_samples(total[4:].tolist())) == str(samples), "compared as text, because NaN differs from itself"


def test_warnings_of_the_library_are_incidents_and_reports_of_waits_are_not(tmp_path, monkeypatch, capsys):
    import logging

    from accel_ddp.ranks import reporting
    from accel_ddp.ranks.process import ending, links
    from accel_ddp.ranks.reporting import warn_on_main
    from accel_ddp.records.incidents import IncidentWriter, read_incidents

    monkeypatch.setattr(links, "incidents", IncidentWriter())
    reporting.configure()
    logging.getLogger("accel_ddp.speed.attach").warning("the layers cannot be compiled: %s", "no compiler")
    with (tmp_path / ".lock").open("w") as lock:  # before, the folder may belong to another run
        monkeypatch.setattr(ending, "run_folder_lock", lock)
        logging.getLogger("accel_ddp.ranks.agreement").warning("waiting for rank 1 to load (10 s)")
        logging.getLogger("accel_ddp.tasks.metrics").warning("--metrics f1: is NaN")
        logging.getLogger("accel_ddp.tasks.metrics").info("a detail")
        warn_on_main("--padding_free on is not possible.", "FALLBACK", step=3)
    links.incidents.close()
    assert [(one.level, one.kind, one.text, one.step) for one in read_incidents(tmp_path)] == [
        ("warning", "FALLBACK", "the layers cannot be compiled: no compiler", -1),
        ("warning", "WARNING", "--metrics f1: is NaN", -1),
        ("warning", "FALLBACK", "--padding_free on is not possible.", 3),
    ]
    printed = capsys.readouterr()
    assert printed.out == "--padding_free on is not possible.\n"
    assert "warning: waiting for rank 1" in printed.err
