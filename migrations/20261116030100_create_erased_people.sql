-- People who were erased and of whom something is still to be removed: what they said in conversations
-- that are not theirs, and whatever a request that was under way in that moment writes after them. The
-- rows that could tell are gone by then, so what to look for is kept here until it is found no more;
-- then the row goes as well.
--
--   merged_ids    the ids of those who had been merged into the person
--   identity_ids  the accounts they had
--   names         the same as `platform:external_id`: stored answers are found by these
--   looked_at     when it was looked for the first time; the second time is the last
create table erased_people (
  tenant_id     uuid        not null constraint erased_people_tenant_fkey references tenants (id),
  user_id       uuid        not null,
  merged_ids    uuid[]      not null,
  identity_ids  uuid[]      not null,
  names         text[]      not null,
  erased_at     timestamptz not null,
  looked_at     timestamptz,
  constraint erased_people_pkey primary key (tenant_id, user_id)
);
create index erased_people_by_age on erased_people (tenant_id, erased_at);
select install_tenant_policy('erased_people');
grant select, insert, update, delete on erased_people to throughline_service;

-- What is found by the person or account that goes; without these, each row that goes is a search
-- through a whole table.
create index codes_of_user on codes (tenant_id, user_id);
create index conversation_grants_of_identity on conversation_grants (tenant_id, identity_id)
  where identity_id is not null;
create index identity_moves_from_user on identity_moves (tenant_id, from_user);
create index identity_presence_of_slot on identity_presence (tenant_id, slot_id) where slot_id is not null;

select install_definer_erase('erased_people');

create or replace function erase_tenant(p_tenant_id uuid, p_limit integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, public
as $$
declare
  target  text;
  erased  integer;
begin
  if not exists (select 1 from tenants where id = p_tenant_id and state = 'deleting') then
    return 0;
  end if;
  foreach target in array array['idempotency', 'api_keys', 'usage_hourly', 'issuers', 'agents',
                                'messages', 'conversation_grants', 'slot_conversations', 'conversations',
                                'deliveries', 'chats', 'codes', 'code_attempts', 'home_channels',
                                'identity_presence', 'identity_moves', 'user_redirects', 'erased_people',
                                'slot_names', 'slots', 'spent_session_ids', 'retention_sweeps',
                                'identities', 'users', 'audit', 'audit_heads'] loop
    execute format(
      'delete from %1$I where tenant_id = $1 and ctid = any (array(
         select ctid from %1$I where tenant_id = $1 limit $2))', target)
      using p_tenant_id, p_limit;
    get diagnostics erased = row_count;
    if erased > 0 then
      return erased;
    end if;
  end loop;
  delete from jobs where tenant_id = p_tenant_id;
  delete from tenants where id = p_tenant_id;
  return 0;
end
$$;
