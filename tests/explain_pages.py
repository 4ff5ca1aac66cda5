"""The data in the pages that `rlx explain` writes."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any


def report_in(text: str) -> dict[str, Any]:
    """The report in the text of a page."""
    found = re.search(r'id="report">([A-Za-z0-9+/=]*)</script>', text)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))
