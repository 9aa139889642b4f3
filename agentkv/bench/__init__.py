"""Measurements that anyone can repeat: `agentkv bench`."""
