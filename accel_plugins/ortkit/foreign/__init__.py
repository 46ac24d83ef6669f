"""Reader of ONNX folders without accel's manifest: single ONNX files and folders of other tools.

The tools are Optimum, transformers.js, onnx-community, transformers' own exporter and onnxruntime-genai.

`file_names` selects the graphs of a folder by file name. `onnx_file` reads and checks one graph. `reader` makes an
artifact from a single graph and leaves the file in its folder. `decoder_components` makes an artifact from the graphs
of a generative model: `graph_merge` and `left_padding_bias` convert the graphs, and the artifact is stored in `ACCEL_HOME`.
`foreign_manifests` reads the manifests of other tools. To support another layout of ONNX files, add a row to the table in
`file_names`.
"""
