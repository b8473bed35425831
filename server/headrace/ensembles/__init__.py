"""Ensembles at work: models without processes, whose requests go through other models."""
