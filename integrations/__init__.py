"""Integrations, one file a framework, over the public API only. None is shipped yet."""
