"""Calls of tools: what a request may ask for, what the model's text means, and how an answer shows it. All pure.

`plan.plan_tools` reads the fields of a request, `chat_parser.ChatParser` the text of one choice, `shapes` writes JSON.
"""
