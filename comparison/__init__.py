"""Two renders of one seed: metrics, verdict, report, pictures."""
