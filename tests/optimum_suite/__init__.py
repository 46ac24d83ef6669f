"""Run Optimum's own tests of `optimum.onnxruntime` through `accel.compat.optimum`, with small local models.

The tests are read from a clone of optimum-onnx and are not part of this repository. The module `plugin` is loaded into
their pytest run, `replacement_modules` replaces the modules that the tests import, `hub` creates the models that the tests name,
and `left_out` lists the tests that do not apply to accel. `python -m tests.optimum_suite --help` shows how to run the
tests.
"""
