"""Calls of tools: what a request may ask for, and what the model's text means. All pure.

`chat_plan.plan_chat` reads a request; the reader that its plan gives for each choice takes the text apart.
"""
