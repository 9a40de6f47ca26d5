"""Damage a file thousands of times, without waiting for the disk each time."""


def rewrite(path, content):
    """Write a file anew: ext4 flushes one that is emptied and filled again, which takes 2 ms."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
