"""The vLLM side: connectors that plan and transfer with vLLM's own Mooncake classes, and record what they do.

Importing this package must stay cheap and safe: vLLM loads `connector.plugin` in every process, also in those that
never use a connector. So nothing is imported here.
"""
