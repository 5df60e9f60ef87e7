-- A summary knows whose words are in it: unlinking and erasing users ask for that.
--
--   source_identities  of a summary: the identities of all user messages that it stands for, joined with those of the
--                      summary that it updates. Null: not known (a caller gave it, or it was imported; all summaries
--                      from before this migration). Empty: it has nobody's words, like one that was blanked
--
-- The check needs no look at old rows, where the column is null: so it is not valid, and holds for every row.
set local lock_timeout = '5s';

alter table messages
  add column source_identities uuid[],
  add constraint messages_only_summaries_have_sources check (source_identities is null or kind = 'summary') not valid;

-- The summaries by identity. A table, since under row-level security no index of an array would be used. A trigger
-- writes it, so that it is true of every writer of a summary.
create table summary_sources (
  tenant_id    uuid    not null,
  identity_id  uuid    not null,
  session_id   uuid    not null,
  seq          bigint  not null,
  constraint summary_sources_pkey primary key (tenant_id, identity_id, session_id, seq),
  constraint summary_sources_message_fkey foreign key (tenant_id, session_id, seq)
    references messages (tenant_id, session_id, seq) on delete cascade
);
create index summary_sources_of_message on summary_sources (tenant_id, session_id, seq);
select install_tenant_policy('summary_sources');
grant select, insert, delete on summary_sources to throughline_service;

create function index_summary_sources() returns trigger
language plpgsql
set search_path = pg_catalog, public
as $$
begin
  delete from summary_sources
   where tenant_id = new.tenant_id
     and session_id = new.session_id
     and seq = new.seq;
  insert into summary_sources (tenant_id, identity_id, session_id, seq)
  select distinct new.tenant_id, s.identity_id, new.session_id, new.seq
    from unnest(new.source_identities) as s (identity_id);
  return null;
end
$$;
revoke execute on function index_summary_sources() from public;
create trigger messages_index_new_sources after insert on messages
  for each row when (new.source_identities is not null) execute function index_summary_sources();
create trigger messages_index_sources after update of source_identities on messages
  for each row execute function index_summary_sources();

-- Erasing users. Summaries of unknown sources are searched for in the conversations where the user wrote, and in the
-- branches of these.
--
--   conversation_ids  where the user wrote: a blanked message does not tell any more, and there is a second search
--   searched_to       the last of them that this search is done with
alter table erased_people
  add column conversation_ids  uuid[] not null default '{}',
  add column searched_to       uuid;
