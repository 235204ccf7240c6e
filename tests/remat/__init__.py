"""The contract of ``functx.remat``, a file a rule or claim."""
