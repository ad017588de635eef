"""Why a run failed and what to try: from its ledger, its logs and what preflight knew. Standard library only."""
