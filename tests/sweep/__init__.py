"""Test all architectures that transformers has for accel's tasks, on all available backends.

In: transformers' own tables of models (`cases`), and a small model with random weights for each (`shrinking`, `building`). Out: a
result for each stage of each backend (a `Cell`, see `cells`), stored in `benchmarks/sweep.json` (`store`) and shown in
`docs/models.md` (`page`). `running` distributes the work to processes; `python -m tests.sweep --help` shows the options.
"""
