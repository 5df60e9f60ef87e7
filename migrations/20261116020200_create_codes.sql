-- Short secrets that prove something about two sides. Only a keyed hash is kept.
--
--   n            which of a person's pending codes it is: four racing mints give three codes
--   minted_by    the account in whose private chat it was shown
--   platform     where it must be redeemed, if its maker said so
--   consumed_at  taken by exactly one: the update that sets it is conditional
--   voided_at    no longer good: seen in a group, replaced, run out, or its maker was parted
create table codes (
  tenant_id    uuid        not null,
  id           uuid        not null,
  purpose      text        not null constraint codes_purpose_known check (purpose in ('link')),
  digest       bytea       not null,
  n            smallint    not null constraint codes_at_most_three check (n between 1 and 3),
  user_id      uuid        not null,
  minted_by    uuid        not null,
  platform     text,
  created_at   timestamptz not null,
  expires_at   timestamptz not null,
  consumed_at  timestamptz,
  consumed_by  uuid,
  voided_at    timestamptz,
  constraint codes_pkey primary key (tenant_id, id),
  constraint codes_digest_once unique (tenant_id, digest),
  constraint codes_user_fkey foreign key (tenant_id, user_id) references users (tenant_id, id) on delete cascade,
  constraint codes_minted_by_fkey foreign key (tenant_id, minted_by)
    references identities (tenant_id, id) on delete cascade,
  constraint codes_consumed_by_fkey foreign key (tenant_id, consumed_by)
    references identities (tenant_id, id) on delete set null (consumed_by)
);
create unique index codes_pending on codes (tenant_id, user_id, purpose, n)
  where consumed_at is null and voided_at is null;
create index codes_minted_by on codes (tenant_id, minted_by);
create index codes_consumed_by on codes (tenant_id, consumed_by) where consumed_by is not null;
create index codes_expired on codes (tenant_id, expires_at);
select install_tenant_policy('codes');
grant select, insert, update, delete on codes to throughline_service;

-- Wrong codes, counted for an account (idn_…), an API key (key_…) and the tenant (ten_…). An attempt is
-- charged before the code is looked at and given back when it was right, so that a crowd of guesses at
-- once is no way around the limit.
create table code_attempts (
  tenant_id     uuid        not null constraint code_attempts_tenant_fkey references tenants (id),
  subject       text        not null,
  failures      integer     not null,
  window_start  timestamptz not null,
  locked_until  timestamptz,
  constraint code_attempts_pkey primary key (tenant_id, subject)
);
select install_tenant_policy('code_attempts');
grant select, insert, update, delete on code_attempts to throughline_service;
