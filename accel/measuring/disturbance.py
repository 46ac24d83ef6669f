"""Detect that other programs used the machine during a timed measurement.

The signs are the load average, the steal time (processor time that a virtual machine did not get), and the spread of the baseline's
rounds. A paired confidence interval gets wider on a busy machine, but does not show the reason. Tables and their JSON form therefore
contain the signs, so that nobody quotes a disturbed measurement as an undisturbed one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOAD = 0.5
"""Threshold: runnable threads per processor, in the minute before the measurement. Above it the machine counts as disturbed."""
STEAL = 0.05
"""Threshold: fraction of processor time that the hypervisor gave to other machines. Above it this machine counts as disturbed."""
SPREAD = 1.3
"""Threshold: ratio of the 90th to the 10th percentile of the baseline's rounds. All rounds time the same calls: on a quiet
machine they differ by 1 to 5 %, most of it between processes."""

_STEAL_FIELD = 7  # column in the line `cpu` of /proc/stat: user nice system idle iowait irq softirq steal (proc(5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Signs that other programs used the machine during a measurement.

    Attributes:
        load_average: Runnable threads in the minute before the measurement; `None` if the system does not count them.
        processors: Number of processors of the machine.
        steal: Fraction of processor time that the hypervisor gave to other machines; `None` if unknown.
        spread: Ratio of the 90th to the 10th percentile of the baseline's rounds, for the workload with the largest ratio; `None`
            without a baseline of several rounds.
        signs: Descriptions of the signs; empty on a quiet machine.
    """

    load_average: float | None = None
    processors: int = 1
    steal: float | None = None
    spread: float | None = None
    signs: tuple[str, ...] = ()

    @property
    def disturbed(self) -> bool:
        """Whether there is any sign that other programs used the machine."""
        return bool(self.signs)


def disturbance(
    rounds: Mapping[str, Sequence[float]],
    *,
    load_average: float | None = None,
    processors: int = 1,
    steal: float | None = None,
) -> Disturbance:
    """Return the signs of other programs during a measurement, from the machine's load and the baseline's latencies.

    Args:
        rounds: By workload, the baseline's latency in each round, in milliseconds.
        load_average: Runnable threads in the minute before the measurement.
        processors: Number of processors of the machine.
        steal: Fraction of processor time that the hypervisor gave to other machines.
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
    """Recorder of the machine's load from its creation on.

    Create the object before accel starts to work, because the load average would also count accel's own work.
    """

    def __init__(self) -> None:
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self._before = _processor_time()

    def judge(self, rounds: Mapping[str, Sequence[float]]) -> Disturbance:
        """Return the signs of other programs since this object was created; see `disturbance`."""
        steal = None
        after = _processor_time()
        if self._before is not None and after is not None and after[1] > self._before[1]:
            steal = (after[0] - self._before[0]) / (after[1] - self._before[1])
        return disturbance(rounds, load_average=self._load, processors=os.cpu_count() or 1, steal=steal)


def _processor_time() -> tuple[int, int] | None:
    """Return stolen and total processor time since the system started, in ticks; `None` on systems other than Linux."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return None
    ticks = [int(word) for word in words[1:]]
    return (ticks[_STEAL_FIELD], sum(ticks)) if len(ticks) > _STEAL_FIELD else None
