"""Tests that take too long for every run: hundreds of killed processes, flipped bits, damaged graphs, full disks, parallel commands.

`python -m tests.endurance kills flips fuzz disk crowd` runs some or all of them, and writes the results to
`benchmarks/endurance.json`; the exit code is 1 if there is a fault. Linux only; `disk` mounts a small file system.
"""
