"""The load generator behind `cumulo bench serve`: plans requests, sends them, measures what comes back.

Works against any OpenAI-compatible server and imports nothing else of `cumulo.serve`.
"""
