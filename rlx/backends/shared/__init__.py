"""Code shared by several backends. It imports no backend and depends on no device."""
