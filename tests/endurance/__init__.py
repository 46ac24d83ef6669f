"""What is too long for every run of the tests: kills, flipped bytes, hostile files, full disks and crowds, by the hundred.

`python -m tests.endurance kills flips fuzz disk crowd` runs some or all, and writes what it found to
`benchmarks/endurance.json`; it ends with 1 where something was found. Linux only; `disk` mounts a small file system.
"""
