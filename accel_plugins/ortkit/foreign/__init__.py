"""ONNX folders without our manifest: Optimum's, transformers.js', onnx-community's, transformers' own exports,
onnxruntime-genai's, or a single ONNX file.

`file_names` chooses the graphs of a folder by their names, `onnx_file` reads and checks one of them. `reader` makes an artifact of one
graph where it is; `decoder_components` of graphs that generate, which `graph_merge` and `mask_bias` change and `ACCEL_HOME` keeps.
`descriptions` reads other tools' own manifests. A new layout of ONNX files is a row in `file_names`.
"""
