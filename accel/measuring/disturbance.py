"""Signs that other programs used the machine while something was timed: load average, steal time, spread of the baseline's rounds.

A paired interval widens when the machine is disturbed, but it cannot say why. These signs are printed with a table and written
into its JSON form, so that a disturbed measurement is never quoted as a quiet one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOAD = 0.5
"""Runnable threads for each processor, in the minute before the measurement, from which on a machine counts as disturbed."""
STEAL = 0.05
"""Share of the processor time that the hypervisor gave to other machines, from which on this one counts as disturbed."""
SPREAD = 1.3
"""How far apart the 10th and the 90th percentile of the baseline's rounds may be. The rounds time the same calls: on a quiet
machine they differ by 1 to 5 %, most of it between processes."""

_STEAL_FIELD = 7  # of the line `cpu` of /proc/stat: user nice system idle iowait irq softirq steal (proc(5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Load of the machine while something was timed.

    Attributes:
        load_average: Runnable threads in the minute before the measurement; `None` where the system does not count them.
        processors: Of the machine.
        steal: Share of the processor time that the hypervisor gave to other machines; `None` where it is unknown.
        spread: The 90th percentile of the baseline's rounds over the 10th, of the workload where it is largest; `None` without
            a baseline of several rounds.
        signs: In words, each thing that says that the machine was disturbed; empty on a quiet one.
    """

    load_average: float | None = None
    processors: int = 1
    steal: float | None = None
    spread: float | None = None
    signs: tuple[str, ...] = ()

    @property
    def disturbed(self) -> bool:
        """Whether there is a sign."""
        return bool(self.signs)


def disturbance(
    rounds: Mapping[str, Sequence[float]],
    *,
    load_average: float | None = None,
    processors: int = 1,
    steal: float | None = None,
) -> Disturbance:
    """Judge a measurement by its conditions and by the baseline's rounds.

    Args:
        rounds: By workload, the baseline's latency in each round, in milliseconds.
        load_average: Runnable threads in the minute before.
        processors: Of the machine.
        steal: Share of the processor time that went to other machines.
    """
    signs = []
    if load_average is not None and load_average > LOAD * processors:
        signs.append(f"the load average was {load_average:.1f} on {processors} processors before the measurement")
    if steal is not None and steal > STEAL:
        signs.append(f"the hypervisor gave {100 * steal:.0f} % of the processor time to other machines")
    largest = None
    for workload, times in rounds.items():
        if len(times) < 2:
            continue
        low, high = (float(end) for end in np.percentile(times, [10, 90]))
        if largest is None or high / low > largest:
            largest = high / low
        if high / low > SPREAD:
            signs.append(f"rounds of the baseline took {low:.3g} to {high:.3g} ms for {workload}")
    return Disturbance(
        load_average=load_average, processors=processors, steal=steal, spread=largest, signs=tuple(signs)
    )


class MachineWatch:
    """Watch the machine from now on. Create it before our own work starts, which the load average would count."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self._before = _processor_time()

    def judge(self, rounds: Mapping[str, Sequence[float]]) -> Disturbance:
        """Judge the time since the watch began; see `disturbance`."""
        steal = None
        after = _processor_time()
        if self._before is not None and after is not None and after[1] > self._before[1]:
            steal = (after[0] - self._before[0]) / (after[1] - self._before[1])
        return disturbance(rounds, load_average=self._load, processors=os.cpu_count() or 1, steal=steal)


def _processor_time() -> tuple[int, int] | None:
    """Stolen and all processor time since the start of the system, in ticks; only Linux has it."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return None
    ticks = [int(word) for word in words[1:]]
    return (ticks[_STEAL_FIELD], sum(ticks)) if len(ticks) > _STEAL_FIELD else None
