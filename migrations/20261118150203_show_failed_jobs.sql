-- A job that fails is retried with backoff and holds up no other. After ten failures in a row it is `failed`:
-- operators see it here, and it is still tried once an hour.
--
--   last_error  the code of the last failure: a word of ours, no content
set local lock_timeout = '5s';

alter table jobs
  add column state       text not null default 'planned' constraint jobs_state_known
             check (state in ('planned', 'failed')),
  add column last_error  text,
  add column failed_at   timestamptz;
create index jobs_failed on jobs (failed_at) where state = 'failed';

-- While a job is leased its `run_at` is infinity, or what was asked for meanwhile.
create index jobs_leased on jobs (lease_until) where lease_until is not null;
