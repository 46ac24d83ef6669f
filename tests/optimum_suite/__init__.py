"""Run Optimum's own tests of `optimum.onnxruntime` through `accel.compat.optimum`, on small local models.

The tests are read from a clone of optimum-onnx and are not part of this repository. `plugin` is loaded into their pytest run,
`stand_ins` replaces the modules that they import, `hub` creates the models that they name, and `left_out` lists the tests that do not
apply to accel. `python -m tests.optimum_suite --help` shows how to run them.
"""
