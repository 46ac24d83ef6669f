"""ONNX folders without our manifest: Optimum's, transformers.js', onnx-community's, transformers' own exports,
onnxruntime-genai's, or a single ONNX file.

`files` chooses the graphs of a folder by their names, `reading` reads one of them; `reader` makes an artifact of one graph
where it is, `decoders` of those that generate, which `graph_merge` and `attention` change and `ACCEL_HOME` keeps; `descriptions`
reads other tools' own manifests. A new layout of ONNX files is a row in `files`.
"""
