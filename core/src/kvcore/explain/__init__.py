"""Why a prompt was, or was not, found, and what it saved: worked out when somebody asks, from what is on record."""
