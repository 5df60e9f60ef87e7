-- no-transaction
-- `turns_of_identity_in_order` serves what it served.
drop index concurrently turns_of_identity;
