"""Measurements that take minutes, each a script of its own."""
