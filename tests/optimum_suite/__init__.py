"""Optimum's own tests of `optimum.onnxruntime`, run through `accel.compat.optimum` on small local models.

The tests stay in a clone of optimum-onnx: nothing of them is here. `plugin` is loaded into their pytest run, `stand_ins`
are the modules that they import, `hub` makes the models that they name, and `left_out` says which of them ask for
something else. `python -m tests.optimum_suite --help` runs them.
"""
