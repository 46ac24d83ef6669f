"""Every architecture that transformers has for our tasks, through every backend that is here.

In: transformers' own tables of models (`cases`), and a small random model of each (`shrinking`, `building`). Out: what
each stage of each backend made of it (`cells`), kept in `benchmarks/sweep.json` (`store`) and shown in `docs/models.md`
(`page`). `running` shares the work out among processes; `python -m tests.sweep --help` shows how to call it.
"""
