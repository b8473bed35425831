"""Runs handlers that were written for TorchServe, in models that `headrace import` has made of its archives."""
