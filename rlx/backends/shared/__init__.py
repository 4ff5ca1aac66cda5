"""Code that several backends use. It imports no backend, and knows no device."""
