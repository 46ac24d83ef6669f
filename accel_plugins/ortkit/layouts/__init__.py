"""Writers of ONNX folders for other libraries: transformers.js, Optimum, and ONNX Runtime's model packages.

`library_graphs` gives the graphs of an artifact the names, inputs and outputs that Optimum introduced and transformers.js reads.
`onnx_folders` writes folders with these graphs. `model_package` writes ONNX Runtime's model packages. The reader of such folders is
`ortkit.foreign`.
"""
