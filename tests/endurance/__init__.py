"""Tests that take too long for every test run: hundreds of killed processes, flipped bits, damaged graphs, full disks,
and parallel commands.

`python -m tests.endurance kills flips fuzz disk crowd` runs the named experiments, and writes the results to
`benchmarks/endurance.json`. The exit code is 1 if an experiment finds a fault. The experiments run only on Linux, and
`disk` mounts a small file system.
"""
