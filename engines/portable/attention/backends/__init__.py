"""One module or package per attention backend."""
