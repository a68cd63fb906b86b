"""Compares the measured settings with the ideal: speed-up, efficiency, and what the lost time was spent on."""

from collections.abc import Sequence
from dataclasses import dataclass

from accel_ddp.scaling.measurement import Measurement
from accel_ddp.scaling.plan import Setting


@dataclass(frozen=True)
class Result:
    """One setting and what was measured, or why nothing was measured."""

    setting: Setting
    measured: Measurement | None
    problem: str = ""
    runs: int = 1

    @property
    def known(self) -> Measurement:
        """The measurement, where there is one."""
        assert self.measured
        return self.measured

    @property
    def samples_per_second(self) -> float:
        return self.setting.batch / self.known.seconds


@dataclass(frozen=True)
class Comparison:
    """A measured setting beside the base, the measured setting of the same table with the fewest ranks."""

    base: Result
    result: Result

    @property
    def share(self) -> float:
        """The work of a rank as a fraction of that in the base: base ranks / ranks in strong scaling, 1 in weak scaling."""
        return self.result.setting.per_rank / self.base.setting.per_rank

    @property
    def speedup(self) -> float:
        return self.result.samples_per_second / self.base.samples_per_second

    @property
    def ideal_speedup(self) -> float:
        return self.result.setting.ranks / self.base.setting.ranks

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ideal_speedup

    def losses(self) -> dict[str, float]:
        """Return the seconds of a step beyond the ideal, by cause. Their sum is the step minus the ideal step."""
        now, base, share = self.result.known, self.base.known, self.share
        beyond = lambda *parts: now.mean(*parts) - share * base.mean(*parts)
        return {
            "communication": now.exposed - share * base.exposed,
            "waiting": now.waiting - share * base.waiting,
            "data": beyond("data"),
            "compute": beyond("forward", "backward"),
            "optimizer": beyond("optimizer"),
            "other": beyond("other"),
        }


def compare(results: Sequence[Result], mode: str) -> list[Comparison]:
    """Return the measured settings of one table, from the fewest to the most ranks."""
    found = [result for result in results if mode in result.setting.modes and result.measured]
    found.sort(key=lambda result: result.setting.ranks)
    return [Comparison(found[0], result) for result in found]


def slowest_rank(measured: Measurement) -> tuple[int, float]:
    """Return the rank that needs the most time itself, and by which fraction it is slower than the median rank."""
    own = measured.own()
    rank = max(range(len(own)), key=own.__getitem__)
    median = sorted(own)[(len(own) - 1) // 2]
    return rank, own[rank] / max(median, 1e-12) - 1
