"""Pictures of a compiled graph: measured times, the report as data, and the page that shows both. Knows no backend."""
