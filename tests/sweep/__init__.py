"""Test all model architectures that transformers has for accel's tasks, on all available backends.

The input is transformers' own tables of models (`cases`), and a small model with random weights for each architecture
and task (`shrinking`, `building`). The output is a result for each stage of each backend (a `Cell`, see `cells`), which
is stored in `benchmarks/sweep.json` (`store`) and shown in `docs/models.md` (`page`). `running` distributes the work to
processes. `python -m tests.sweep --help` shows the options.
"""
