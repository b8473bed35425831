"""Generated from protos/*.proto by protos/generate.py; not edited by hand."""
