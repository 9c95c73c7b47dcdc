"""``python -m fuzz`` is ``specfuzz``."""

from fuzz.cli import main

# Spawned processes import this module under another name.
if __name__ == "__main__":
    main()
