"""Engines that others wrote, behind `engine.Engine`: vLLM and llama.cpp. Each is imported by its maker alone."""
